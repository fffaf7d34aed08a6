"""A package of one's own for rayapp: a data format, a loss, a metric and a hook."""
