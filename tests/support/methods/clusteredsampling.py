METHOD = "clustered-sampling"
LOOKS_CLOSER = True
