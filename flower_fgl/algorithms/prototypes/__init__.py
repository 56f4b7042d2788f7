"""Class prototypes as pure tensor functions, used by server and clients."""
