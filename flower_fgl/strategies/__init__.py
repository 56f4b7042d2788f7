"""Server halves of the methods; none of them touches a data set."""
