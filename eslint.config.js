// Rules for the page's scripts. CommonJS, because the packages live in .cache/node (`make npm`), and an `import`
// would look for them next to this file only.
const { createRequire } = require("node:module");

const tools = createRequire(`${__dirname}/.cache/node/package.json`);
const js = tools("@eslint/js");
const globals = tools("globals");

// Names of models, heads and documents come from data: they reach the page as text, never as markup or code.
const asMarkup = "Names come from data: build elements and set textContent, or createElementNS for SVG.";
const markupProperties = ["innerHTML", "outerHTML", "srcdoc"];
const markupMethods = ["insertAdjacentHTML", "createContextualFragment", "setHTMLUnsafe", "parseHTMLUnsafe"];
const documentMethods = ["write", "writeln"];

module.exports = [
  { ignores: [".cache/", ".venv/", "results/"] },
  js.configs.recommended,
  {
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      eqeqeq: "error",
      "no-eval": "error",
      "no-implicit-globals": "error",
      "no-implied-eval": "error",
      "no-new-func": "error",
      "no-restricted-properties": [
        "error",
        ...[...markupProperties, ...markupMethods].map((property) => ({ property, message: asMarkup })),
        ...documentMethods.map((property) => ({ object: "document", property, message: asMarkup })),
      ],
      "no-restricted-syntax": [
        "error",
        {
          selector: "CallExpression[callee.property.name='setAttribute'][arguments.0.value=/^(on|srcdoc$)/i]",
          message: "An attribute that holds code or markup: use addEventListener, or build elements.",
        },
      ],
      "no-script-url": "error",
      "no-unused-vars": "error",
      "no-var": "error",
      "prefer-const": "error",
    },
  },
  {
    files: ["src/qkscope/page/static/**/*.js"],
    languageOptions: { sourceType: "module", globals: globals.browser },
  },
  {
    files: ["eslint.config.js"],
    languageOptions: { sourceType: "commonjs", globals: globals.node },
  },
];
