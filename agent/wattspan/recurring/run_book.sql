-- Tables of a file of runs. The whole script migrates version 1; its middle part makes a new file.
--
-- A holder is the file (key 0), a user or pod below it, or a principal below that; triggers keep the
-- sums of its jobs, runs and bytes: 1024 bytes of a holder, 256 of a run and 512 of a job are upper
-- estimates of a row with its indexes; names and terms of a job are added. All hosts of a shared file
-- can read it: every statement works with SQLite 3.25.

-- Version 1 had user ids as owners, and one sequence of numbers of runs.
DROP INDEX run_of_job;
ALTER TABLE run RENAME TO run_1;
ALTER TABLE job RENAME TO job_1;

-- part: schema
CREATE TABLE holder (
    key INTEGER PRIMARY KEY,
    parent INTEGER,
    name TEXT NOT NULL UNIQUE,
    jobs INTEGER NOT NULL DEFAULT 0,
    runs INTEGER NOT NULL DEFAULT 0,
    open INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0,
    last_run INTEGER NOT NULL DEFAULT 0,
    used INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE job (
    key INTEGER PRIMARY KEY,
    owner INTEGER NOT NULL,
    name TEXT NOT NULL,
    gpus TEXT NOT NULL,
    terms BLOB NOT NULL,
    bytes INTEGER NOT NULL,
    runs INTEGER NOT NULL DEFAULT 0,
    newest INTEGER NOT NULL DEFAULT 0,
    forgotten INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE run (
    key INTEGER PRIMARY KEY,
    owner INTEGER NOT NULL,
    number INTEGER NOT NULL,
    job INTEGER NOT NULL,
    batch_size INTEGER NOT NULL,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    process_started INTEGER NOT NULL,
    began INTEGER NOT NULL,
    outcome TEXT,
    energy REAL NOT NULL DEFAULT 0,
    seconds REAL NOT NULL DEFAULT 0,
    power REAL NOT NULL DEFAULT 0,
    epochs INTEGER NOT NULL DEFAULT 0
);

CREATE INDEX holder_by_size ON holder (parent, bytes);
CREATE INDEX holder_with_open_runs ON holder (parent) WHERE open > 0;
CREATE INDEX holder_with_jobs ON holder (parent) WHERE jobs > 0;
CREATE INDEX holder_without_runs ON holder (used) WHERE runs = 0 AND parent > 0;
CREATE UNIQUE INDEX job_by_name ON job (owner, name, gpus) WHERE forgotten = 0;
CREATE INDEX job_by_use ON job (owner, newest) WHERE forgotten = 0;
CREATE INDEX forgotten_jobs ON job (forgotten) WHERE forgotten = 1;
CREATE UNIQUE INDEX run_by_number ON run (owner, number);
CREATE INDEX run_of_job ON run (job, number);
CREATE INDEX run_open_of_owner ON run (owner, number) WHERE outcome IS NULL;
CREATE INDEX run_open_of_job ON run (job) WHERE outcome IS NULL;
CREATE INDEX run_open_by_age ON run (began) WHERE outcome IS NULL;

CREATE TRIGGER holder_added AFTER INSERT ON holder WHEN NEW.parent > 0 BEGIN
    UPDATE holder SET bytes = bytes + 1024 WHERE key IN (0, NEW.parent, NEW.key);
END;
CREATE TRIGGER holder_removed AFTER DELETE ON holder WHEN OLD.parent > 0 BEGIN
    UPDATE holder SET bytes = bytes - 1024 WHERE key IN (0, OLD.parent);
    DELETE FROM holder WHERE key = OLD.parent
        AND NOT EXISTS (SELECT 1 FROM holder WHERE parent = OLD.parent);
END;
CREATE TRIGGER job_added AFTER INSERT ON job BEGIN
    UPDATE holder SET jobs = jobs + 1, bytes = bytes + NEW.bytes
        WHERE key IN (NEW.owner, (SELECT parent FROM holder WHERE key = NEW.owner), 0);
END;
CREATE TRIGGER job_forgotten AFTER UPDATE OF forgotten ON job BEGIN
    UPDATE holder SET jobs = jobs - 1
        WHERE key IN (NEW.owner, (SELECT parent FROM holder WHERE key = NEW.owner), 0);
END;
CREATE TRIGGER job_removed AFTER DELETE ON job BEGIN
    UPDATE holder SET jobs = jobs - 1 + OLD.forgotten, bytes = bytes - OLD.bytes
        WHERE key IN (OLD.owner, (SELECT parent FROM holder WHERE key = OLD.owner), 0);
END;
CREATE TRIGGER run_added AFTER INSERT ON run BEGIN
    UPDATE job SET runs = runs + 1, newest = max(newest, NEW.number) WHERE key = NEW.job;
    UPDATE holder SET last_run = max(last_run, NEW.number), runs = runs + 1,
        open = open + (NEW.outcome IS NULL), bytes = bytes + 256, used = max(used, NEW.began)
        WHERE key IN (NEW.owner, (SELECT parent FROM holder WHERE key = NEW.owner), 0);
END;
CREATE TRIGGER run_ended AFTER UPDATE OF outcome ON run
    WHEN OLD.outcome IS NULL AND NEW.outcome IS NOT NULL BEGIN
    UPDATE holder SET open = open - 1
        WHERE key IN (NEW.owner, (SELECT parent FROM holder WHERE key = NEW.owner), 0);
END;
CREATE TRIGGER run_removed AFTER DELETE ON run BEGIN
    UPDATE job SET runs = runs - 1 WHERE key = OLD.job;
    UPDATE holder SET runs = runs - 1, open = open - (OLD.outcome IS NULL), bytes = bytes - 256
        WHERE key IN (OLD.owner, (SELECT parent FROM holder WHERE key = OLD.owner), 0);
    DELETE FROM job WHERE key = OLD.job AND runs = 0;
END;

INSERT INTO holder (key, name) VALUES (0, '');
PRAGMA application_id = 2003985763;
PRAGMA user_version = 2;

-- part: rows of version 1
INSERT INTO holder (parent, name) SELECT DISTINCT 0, '["uid",' || owner || ']' FROM job_1;
INSERT INTO holder (parent, name)
    SELECT holder.key, '[' || owner || ',"",""]' FROM (SELECT DISTINCT owner FROM job_1)
    JOIN holder ON holder.name = '["uid",' || owner || ']';
INSERT INTO job (key, owner, name, gpus, terms, bytes)
    SELECT job_1.key, holder.key, job_1.name, gpus, terms,
        512 + 8 * length(job_1.name) + 8 * length(gpus) + length(terms)
    FROM job_1 JOIN holder ON holder.name = '[' || owner || ',"",""]'
    WHERE EXISTS (SELECT 1 FROM run_1 WHERE job = job_1.key);
INSERT INTO run (owner, number, job, batch_size, host, pid, process_started, began, outcome,
        energy, seconds, power, epochs)
    SELECT job.owner, run_1.key, job, batch_size, host, pid, process_started, began, outcome,
        energy, seconds, power, epochs
    FROM run_1 JOIN job ON job.key = run_1.job ORDER BY run_1.key;
DROP TABLE run_1;
DROP TABLE job_1;
