"""Folders of other libraries, one module a format, imported only when such a folder is read or written."""
