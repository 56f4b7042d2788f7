"""Secure aggregation: the server learns sums of the clients' uploads, and no upload.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
CCS 2017, the protocol against an honest-but-curious server. Every vector is encoded in
fixed point (:mod:`.fixed_point`) and masked by one stream per pair of clients, which
cancels in the sum, and one of the client's own (:mod:`.keys`). Shares of both secrets
(:mod:`.shamir`) lie with the other clients, so that the masks of a client that is lost can
be taken out, and the own masks of those that are not. :mod:`.member` is the client half,
:mod:`.round` the server half, :mod:`.payloads` what crosses the wire, :mod:`.additive`
what a method has to say.

======================  ==============================================================
exchange                what travels
======================  ==============================================================
``describe``, once      up: the public key to which shares are sealed
``secure_shares``       down: those keys. Up: a mask key, sealed shares, their digests
the training exchange   down: mask keys, the shares sealed to the client. Up: the masked sum
``secure_unmask``       down: who is in the sum. Up: one share per client
======================  ==============================================================

Notes
-----
1. The paper has four exchanges. Here the keys that seal shares live as long as the run and
   come with the describe exchange, which leaves three. They are never shared, so no
   reconstruction reveals them; the mask keys that can be reconstructed are new every round.
2. Keys are drawn from the operating system, not from the run's seed: they must not be
   guessed, and the sum does not depend on them, since masks cancel exactly.
3. Nothing is taken from ``flwr.common.secure_aggregation``, after a look at each part.
   ``pseudo_rand_gen`` folds its key into 32 bits by xor, which can be tried through, and
   never draws the largest number. ``quantize`` clips silently and draws from NumPy's global
   generator. ``shamir`` is sound, but works on 16-byte blocks in Python: seconds per client
   at 100 clients, where one prime field needs milliseconds. ``symmetric_encryption`` is
   sound, but binds a key to no round and no receiver, and base64 doubles the bytes of a
   share. X25519, HKDF, AES-CTR and AES-GCM come from ``cryptography``, which Flower itself
   uses.
4. The server cannot look into a single upload: neither a huge number nor nonsense is seen
   there. A client refuses to encode NaN and numbers out of range; an entry that must sum up
   to the number of clients shows that the masks cancelled.
"""
