"""AdaFGL: propagation by alike predictions, signed messages, and the network of step 2."""
