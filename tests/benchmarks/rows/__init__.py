"""The rows of the table of targets: what each should reach, and how it is measured.

=============  ===================================================================
module         what
=============  ===================================================================
`targets`      every target, as data
`figures`      what was measured beside it: the table, and the same as JSON
`timing`       ratios within one run, from interleaved pairs
`pipelines`    the same update, with our hooks and as one would write it by hand
`tiny`         the network of the loops
`peers`        the libraries that are measured beside us, where they are installed
`counts`       host reads, bytes and operations, exactly; what a skipped step moves
`loops`        whole steps of a tiny network
`updates`      the update alone, and the average alone
`dispatch`     calling hooks
`equality`     every path against the others, and who waits: for gpu.py
`floors`       the time of an update beside that of its bytes: for gpu.py
`processes`    importing and listing, in processes of their own
=============  ===================================================================
"""
