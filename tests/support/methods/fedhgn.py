METHOD = "fedhgn"
WEIGHTED = {"weight": 0.5}
NEEDED = {"fedhgn": {"alignment": "peers"}}
