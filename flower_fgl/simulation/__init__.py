"""Run an experiment on this machine: in this process or under Flower's simulation."""
