"""An optimizer whose parameters have owners; its state: brought together, checked, and dealt out to them."""
