"""Warn of held-out documents that are also in the training text, perhaps in another source of a mixture."""

from collections.abc import Mapping
from logging import WARNING

import numpy as np

from ringattn.train.data.documents import TokenisedDocuments
from ringattn.train.data.workers import log_once

# Fewer duplicates hardly change the loss, and different documents may have equal checksums.
MIN_SHARE = 0.001


def warn_of_duplicates(held_out: TokenisedDocuments, training: Mapping[str, TokenisedDocuments]) -> None:
    """Compare the lengths and checksums of whole documents. The mapping `training` contains the text of each source, by
    name.
    """
    own, names = held_out.keys, list[str]()
    ordered, is_known = np.unique(own), np.zeros(len(own), dtype=bool)
    for name, text in training.items():
        # `np.isin` would sort all keys, which takes ten times as long.
        keys = text.keys
        equal = keys[ordered[np.searchsorted(ordered, keys) % len(ordered)] == keys]
        found = (own > 0) & np.isin(own, equal)
        is_known |= found
        names += [name] if found.any() else []
    if (share := held_out.lengths[is_known].sum() / held_out.lengths.sum()) >= MIN_SHARE:
        log_once(
            f"{'duplicates':<12}{is_known.sum():,} of {len(own):,} held-out documents ({share:.1%} of the held-out tokens) are "
            f"also in the training text of {' and '.join(names)}, so eval_loss is too low: remove duplicates from the text",
            WARNING,
        )
