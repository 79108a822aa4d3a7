"""The models: packed tokens in, sums of the loss out.

Dimensions, as suffixes of names and in shapes:

    T  packed tokens of a micro-batch      V  vocabulary
    D  model width                         N  documents
    H  query heads                         B  rows
    G  key/value heads                     S  sequence length of a row
    K  head width                          R  data-parallel ranks
    F  feed-forward width

Enter through `pretrain.model.registry.build_model`.
"""
