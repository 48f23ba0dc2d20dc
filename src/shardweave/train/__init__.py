"""The runtime: training on explicit groups, planned without torch and made from a store that is passed in."""
