// Lint rules of the page's modules: the recommended ones, and nothing that could turn text into markup.
// The linter lives in .cache/node, outside the repository's own files, so its packages are looked up there.
const { createRequire } = require("node:module");
const path = require("node:path");

const installed = createRequire(path.join(__dirname, ".cache/node/package.json"));
const js = installed("@eslint/js");
const globals = installed("globals");

module.exports = [
  { ignores: [".cache/", ".venv/", "results/"] },
  js.configs.recommended,
  {
    files: ["src/qkscope/page/static/*.js"],
    languageOptions: { ecmaVersion: 2023, sourceType: "module", globals: globals.browser },
    rules: {
      eqeqeq: "error",
      "no-var": "error",
      "prefer-const": "error",
      "no-restricted-properties": [
        "error",
        { property: "innerHTML" },
        { property: "outerHTML" },
        { property: "insertAdjacentHTML" },
      ],
    },
  },
  { files: ["eslint.config.js"], languageOptions: { sourceType: "commonjs", globals: globals.node } },
];
