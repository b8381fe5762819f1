"""The trimmed product in Triton: what runs on the GPU, or in Triton's interpreter. `gpu` calls it.

Two matrices with rows of d numbers meet: x (samples) and weight (rows). One of them is walked: each of its rows from
its largest magnitude on, by one warp, while 32 rows of the other lie in the lanes. Once the magnitude that follows
cannot pass a cut of any lane, nothing further can. Which side is walked is chosen for each 32 samples: the weight where
many coordinates of a sample are about as large as its largest (images), else the samples.

Where many terms leave, they are counted instead: row by row (`_select`) or in tiles (`_count`). Gradients are products
in which the cuts mask the terms.

Walk and `_select` get the dense product and take the removed terms out of it. Outlying coordinates of a sample are
zeros in its panel and in the dense product; their terms, clamped to what the others can reach, join the selection
apart. Where this short cut is unsound (ties that matter, cancellation, infinities), `by_definition` does the pair.
"""

from ._count import count_terms, cut_bands, guess_pivots, move_pivots, odd_pairs, powers, solve, sum_between
from ._gradients import weight_gradient, weight_parts
from ._language import ALIGNED
from ._layout import order_rows, pack
from ._masked import masked_product, masked_ties
from ._networks import SORT8, SORT16, merge
from ._select import CANDIDATES, select
from ._walk import walk
