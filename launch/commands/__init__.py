"""One module per subcommand: `register(subparsers)` and handlers `(args) -> int`; light to import."""
