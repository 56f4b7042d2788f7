"""FedLoG: learnable nodes per class, branch classifiers, prompts, synthetic nodes.

Kim et al., "Subgraph Federated Learning for Local Generalization", ICLR 2025.
"""
