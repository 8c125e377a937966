"""Parameters that their owners keep as rows, and that are whole only while a module uses them."""
