"""FedHGN."""

METHOD = "fedhgn"
NEEDED = {"fedhgn.alignment": "peers"}
