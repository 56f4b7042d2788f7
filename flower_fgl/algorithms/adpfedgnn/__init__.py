"""ADPFedGNN: neighbour sampling, Q-learning agent, masks and mutual information."""
