from tests.support.methods.dense import NEEDED as DENSE_NEEDED
from tests.support.methods.dense import SHORT as DENSE_SHORT

METHOD = "co-boosting"
DOWNLOAD_ACTION = "finetune"
SHORT = {
    **{key: value for key, value in DENSE_SHORT.items() if key != "dense"},
    METHOD: DENSE_SHORT["dense"],
}
WEIGHTED = {"adversarial_weight": 1.0}
NEEDED = {METHOD: DENSE_NEEDED["dense"]}
LOOKS_CLOSER = True
