"""What a layer costs before it is built: FLOPs and bytes, the roofline bound, and head similarity."""
