"""Names and declarations of an application's streams, buckets and consumers, and the plan that creates them."""
