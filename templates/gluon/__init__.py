"""The kernel of one pass in Gluon, for sm_90."""
