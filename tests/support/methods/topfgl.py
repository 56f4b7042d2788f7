METHOD = "topfgl"
LOOKS_CLOSER = True
