"""What FedPANO computes: a personal model, a generator of nodes, and what is shared.

Zhao et al., "Personalized federated few-shot node classification", Sci China Inf Sci
68(1):112105, 2025.
"""
