"""Load the named datasets and generate the synthetic one."""
