"""Keep a fleet's data in one database: SQLite in a file, or PostgreSQL, with the same tables and the same statements.

Read `transaction` first: what the rest of the fleet may do with a store. Then `schema`, the tables; `sqlite` and
`postgres`, the two databases; `opening`, which chooses between them.

Public names:
    opening      open_store, open_existing
    transaction  FleetStore, Transaction, ReportRow, Row, write_with_retries
"""
