"""What FedPANO computes: a personal model, a generator of nodes, and what is shared."""
