"""Warnings of libraries about sparse features."""

from __future__ import annotations

import warnings

import pytest

from flower_fgl.nn.sparse import quiet_csr


def test_torchs_notes_on_csr_tensors_do_not_reach_users() -> None:
    with quiet_csr():
        warnings.warn("Sparse CSR tensor support is in beta state.", stacklevel=1)
        # given by torch 2.11 for a process's first CSR tensor
        warnings.warn(
            "Sparse invariant checks are implicitly disabled. Memory errors (e.g. "
            "SEGFAULT) will occur",
            stacklevel=1,
        )
        # given since torch 2.15 when torch.load reads a loader's processed file
        warnings.warn(
            "Validating sparse tensor invariants because weights_only=True; this is an "
            "O(nnz) scan per sparse tensor and may be slow for large checkpoints.",
            stacklevel=1,
        )
        with pytest.raises(UserWarning, match="other"):
            warnings.warn("other", stacklevel=1)
