"""Secure aggregation: the server learns the sum of the uploads, but no single upload.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017; ``docs/secure-aggregation.md`` has the exchanges. :mod:`.client` is the client
side, :mod:`.server` the server side, :mod:`.messages` the payloads, and :mod:`.additive`
the interface that a method implements.

Notes
-----
1. The keys that encrypt shares live as long as the run, and are never shared. The mask
   keys, which can be reconstructed, are new in every round.
2. Keys come from the operating system's random numbers, not from the run's seed. The sum
   does not depend on them, since masks cancel exactly.
3. Nothing is used from ``flwr.common.secure_aggregation``: its streams have keys of 32
   bits, its ``quantize`` clips silently, and its ``shamir`` takes seconds per client.
4. The server cannot detect a huge or meaningless upload. Clients refuse to encode NaN and
   numbers out of range. An additional entry, whose sum must equal the number of clients,
   shows that the masks cancelled.
"""
