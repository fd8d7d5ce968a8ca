"""The plugin library: where its source is, how it is built, where built ones are found, how one is loaded.

    source   the C++ that is shipped
    headers  what of other people it is compiled against, and where that was found
    compile  from source to a library in the cache folder
    library  what a built library says of itself
    search   the libraries of this machine, and the one that fits a TensorRT
    load     into the registry of a TensorRT, once a process

Only `load` touches TensorRT; everything else needs the standard library alone.
"""
