"""A persistent worker process that handles all messages of one data owner.

In a deployment Flower starts one process per message. If the node config sets
``worker-idle``, that process imports neither torch nor a graph. Instead it sends the
message to the data owner's worker through a Unix domain socket, as Flower's protobuf
bytes.
"""
