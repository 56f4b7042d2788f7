"""Graph files from the tables of a data owner, by a recipe: ``flower-fgl prepare``."""
