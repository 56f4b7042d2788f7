"""A persistent worker process that handles all messages of one data owner.

In a deployment Flower starts one process per message. If the node config sets
``worker-idle``, that process imports neither torch nor a graph. Instead it sends the
message to the data owner's worker through a Unix domain socket. Messages travel as Flower's
protobuf bytes; nothing is pickled.

- ``client``: the message process, which connects to the worker or starts it.
- ``process``: start and end of the worker process.
- ``server``: the worker's loop over messages.
- ``socket_path``: the path of the socket, and the SuperNode that the worker belongs to.
- ``wire``: the bytes sent through the socket.
"""
