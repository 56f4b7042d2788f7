"""FedLoG: learnable nodes per class, branch classifiers, prompts, synthetic nodes."""
