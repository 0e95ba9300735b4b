"""``jetspark demo``: runs the application of ``examples/orders`` end to end, and checks each stage."""
