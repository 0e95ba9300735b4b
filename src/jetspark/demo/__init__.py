"""``jetspark demo``: the application of ``examples/orders``, end to end, with everything checked on the way."""
