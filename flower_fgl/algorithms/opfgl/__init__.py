"""O-pFGL: class statistics, pseudo-graph, pseudo-labels and distillation."""
