"""AdaFGL: propagation by alike predictions, signed messages, and the network of step 2.

Li et al., "AdaFGL: A New Paradigm for Federated Node Classification with Topology
Heterogeneity", ICDE 2024.
"""
