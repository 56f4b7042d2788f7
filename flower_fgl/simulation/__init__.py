"""Run experiments on this machine, in this process or with Flower's simulation."""
