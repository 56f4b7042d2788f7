METHOD = "fedsem"
LOOKS_CLOSER = True
