METHOD = "fedsst"
NO_TERM = {"rise_weight": "part of a score", "middle_weight": "part of a score"}
