-- Schema of the store. Each part migrates the version before it; `database.py` reads them in order.
--
-- The history holds every joule once, at one `step`: first in a minute, later in an hour, then in a
-- day. The sum over an interval is therefore a sum over rows of any step, and a roll-up counts
-- nothing twice.

-- migration 1: checkpoint and history
CREATE TABLE books (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    packed BLOB NOT NULL
) STRICT;

CREATE TABLE domain (
    key INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    hw_type TEXT NOT NULL,
    name TEXT NOT NULL,
    provenance TEXT NOT NULL,
    method TEXT NOT NULL,
    in_cover INTEGER NOT NULL,
    attributed INTEGER NOT NULL,
    UNIQUE (id, hw_type, name, provenance, method, in_cover, attributed)
) STRICT;

CREATE TABLE owner (
    key INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    hw_type TEXT NOT NULL,
    name TEXT NOT NULL,
    "group" TEXT NOT NULL,
    rest INTEGER NOT NULL,
    UNIQUE (kind, hw_type, name, "group", rest)
) STRICT;

CREATE TABLE domain_energy (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    domain INTEGER NOT NULL,
    energy INTEGER NOT NULL,
    consumers INTEGER NOT NULL,
    idle INTEGER NOT NULL,
    unattributed INTEGER NOT NULL,
    PRIMARY KEY (step, start, domain)
) STRICT, WITHOUT ROWID;

CREATE TABLE gap (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    domain INTEGER NOT NULL,
    reason TEXT NOT NULL,
    nanoseconds INTEGER NOT NULL,
    PRIMARY KEY (step, start, domain, reason)
) STRICT, WITHOUT ROWID;

CREATE TABLE owner_energy (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    owner INTEGER NOT NULL,
    energy INTEGER NOT NULL,
    PRIMARY KEY (step, start, owner)
) STRICT, WITHOUT ROWID;

-- migration 2: spans
CREATE TABLE span (
    key INTEGER PRIMARY KEY,
    role TEXT NOT NULL,
    service TEXT NOT NULL,
    name TEXT NOT NULL,
    UNIQUE (role, service, name)
) STRICT;

CREATE TABLE span_energy (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    span INTEGER NOT NULL,
    hw_type TEXT NOT NULL,
    energy INTEGER NOT NULL,
    PRIMARY KEY (step, start, span, hw_type)
) STRICT, WITHOUT ROWID;

CREATE TABLE span_work (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    span INTEGER NOT NULL,
    calls INTEGER NOT NULL,
    nanoseconds INTEGER NOT NULL,
    tokens_in INTEGER NOT NULL,
    tokens_out INTEGER NOT NULL,
    PRIMARY KEY (step, start, span)
) STRICT, WITHOUT ROWID;

-- migration 3: rates
CREATE TABLE rate (
    kind TEXT NOT NULL,
    start INTEGER NOT NULL,
    unit TEXT NOT NULL,
    rate INTEGER,
    PRIMARY KEY (kind, start)
) STRICT, WITHOUT ROWID;

-- migration 4: energy without a known baseline
ALTER TABLE domain_energy ADD COLUMN withheld INTEGER NOT NULL DEFAULT 0;

-- migration 5: static and dynamic energy of spans
CREATE TABLE span_split (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    span INTEGER NOT NULL,
    basis TEXT NOT NULL,
    static INTEGER NOT NULL,
    dynamic INTEGER NOT NULL,
    PRIMARY KEY (step, start, span, basis)
) STRICT, WITHOUT ROWID;

-- migration 6: requests to language models
CREATE TABLE request_division (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    span INTEGER NOT NULL,
    division TEXT NOT NULL,
    requests INTEGER NOT NULL,
    PRIMARY KEY (step, start, span, division)
) STRICT, WITHOUT ROWID;

-- migration 7: owners of spans
CREATE TABLE owned_span (
    key INTEGER PRIMARY KEY,
    role TEXT NOT NULL,
    service TEXT NOT NULL,
    name TEXT NOT NULL,
    owner TEXT NOT NULL DEFAULT '',
    UNIQUE (role, service, name, owner)
) STRICT;
INSERT INTO owned_span (key, role, service, name) SELECT key, role, service, name FROM span;
DROP TABLE span;
ALTER TABLE owned_span RENAME TO span;

-- migration 8: energy of requests on the whole host by part
CREATE TABLE request_host (
    step INTEGER NOT NULL,
    start INTEGER NOT NULL,
    span INTEGER NOT NULL,
    part TEXT NOT NULL,
    energy INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    tokens_out INTEGER NOT NULL,
    PRIMARY KEY (step, start, span, part)
) STRICT, WITHOUT ROWID;
