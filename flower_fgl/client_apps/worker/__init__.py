"""A worker that stays between messages, where an owner's node config asks for one.

Flower starts a process for every message of a deployment. With ``worker-idle`` in the node
config that process (:mod:`~flower_fgl.client_apps.worker.client`) imports neither torch nor a graph,
but hands its message to the owner's worker (:mod:`~flower_fgl.client_apps.worker.process`, which works
by :mod:`~flower_fgl.client_apps.worker.server`) through a Unix domain socket in a folder of the
owner's (:mod:`~flower_fgl.client_apps.worker.socket_path`), as bytes of Flower's own protobuf messages
(:mod:`~flower_fgl.client_apps.worker.wire`). Nothing is pickled.
"""
