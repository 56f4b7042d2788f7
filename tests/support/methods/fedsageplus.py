METHOD = "fedsage+"
SHORT = {"fedsage+": {"gen_rounds": 2, "gen_channels": 8, "gen_wide_channels": 16}}
WEIGHTED = {"peer_weight": 0.5}
LOOKS_CLOSER = True
