"""Load the named graphs and draw the synthetic one."""
