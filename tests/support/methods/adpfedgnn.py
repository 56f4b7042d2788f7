METHOD = "adpfedgnn"
SHORT = {"local_epochs": 1}
WEIGHTED = {"lambda_mi": 0.3, "lambda_reg": 0.003}
NO_TERM = {"beta": "mixes the logits of both branches"}
# the estimator of mutual information knows nothing at first, and its bound is then 0
NEEDED = {"rounds": 4, "adpfedgnn": {"network_lr": 0.01}}
NETWORKS = [{}, {"eval-actions": "greedy", "beta": 0.9}, {"selection": "all"}]
