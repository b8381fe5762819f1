"""The trimmed product in Triton: what runs on the GPU, or in Triton's interpreter. `gpu` calls it.

Two matrices with rows of d numbers meet: x (samples) and weight (rows). One of them is walked: each of its rows from
its largest magnitude on, by one warp, while 32 rows of the other lie in the lanes. Once the magnitude that follows
cannot pass a cut of any lane, nothing further can. Which side is walked is chosen for each 32 samples: the weight where
many coordinates of a sample are about as large as its largest (images), else the samples.

Outlying coordinates of a sample are zeros in its panel and in the dense product; their terms, clamped to what the
others can reach, join the list apart. What leaves is taken out of the dense product. Where this short cut is unsound
(ties that matter, cancellation, infinities), `by_definition` does the pair.

Where many terms leave, or there are few at all, a warp holds all terms of a pair and counts them (`select`): its price
hardly depends on how many leave. Gradients are products in which the cuts mask the terms.
"""

from ._gradients import weight_gradient, weight_parts
from ._language import ALIGNED
from ._layout import order_rows, pack
from ._masked import masked_product, masked_ties
from ._networks import SORT8, SORT16, merge
from ._select import scale_rows, select
from ._walk import walk
