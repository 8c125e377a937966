"""Parameters whose rows somebody else keeps: DTensors, as FSDP2 makes them."""
