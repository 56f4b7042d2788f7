"""What ADPFedGNN computes: neighbour blocks, an agent, masks and mutual information."""
