"""Secure aggregation: the server learns the sum of the uploads, but no single upload.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017, the protocol against an honest-but-curious server. Every vector is encoded in
fixed point (:mod:`.quantization`). It is masked by one stream per pair of clients, which
cancels in the sum, and by a stream of the client itself (:mod:`.keys`). The other clients
hold shares of both secrets (:mod:`.shamir`), so that the server can remove the pairwise
masks of clients that dropped out and the own masks of all others. :mod:`.client` is the
client side, :mod:`.server` the server side, :mod:`.messages` the payloads, and
:mod:`.additive` the interface that a method implements.

======================  ==============================================================
message                 content
======================  ==============================================================
``describe``, once      up: the public key that encrypts shares to the client
``secure_shares``       down: these keys. Up: mask key, encrypted shares, their digests
training message        down: mask keys, the shares for the client. Up: the masked vector
``secure_unmask``       down: the clients in the sum. Up: one share per client
======================  ==============================================================

Notes
-----
1. The paper has four exchanges per round. Here the keys that encrypt shares live as
   long as the run and are sent with the describe reply, which leaves three. These keys
   are never shared, so no reconstruction reveals them. The mask keys, which can be
   reconstructed, are new in every round.
2. Keys come from the operating system's random numbers, not from the run's seed: they
   must not be predictable. The sum does not depend on them, since masks cancel exactly.
3. Nothing is used from ``flwr.common.secure_aggregation``. ``pseudo_rand_gen`` folds
   its key into 32 bits by xor, which allows a brute-force search, and never draws the
   largest number. ``quantize`` clips silently and uses NumPy's global generator.
   ``shamir`` is sound, but works on 16-byte blocks in Python: seconds per client at 100
   clients, where a single prime field needs milliseconds. ``symmetric_encryption`` is
   sound, but does not bind a key to a round and a receiver, and its base64 doubles the
   bytes of a share. X25519, HKDF, AES-CTR and AES-GCM come from ``cryptography``, which
   Flower itself uses.
4. The server cannot inspect single uploads, so it cannot detect a huge or meaningless
   one. Clients refuse to encode NaN and numbers out of range. An additional entry,
   whose sum must equal the number of clients, shows that the masks cancelled.
"""
